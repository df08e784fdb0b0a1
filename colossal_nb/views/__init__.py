"""From records to pictures: one file a view, each with its tables, its drawing and its sentence. Pure functions."""

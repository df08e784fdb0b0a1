"""Interactive parallel training in PyTorch, made visible."""

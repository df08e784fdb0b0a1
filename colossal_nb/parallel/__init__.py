"""The runtime: it does what `colossal_nb.plan` says and writes what happened into `colossal_nb.record`."""

"""Real processes from a notebook: torchrun, and the report of each rank."""

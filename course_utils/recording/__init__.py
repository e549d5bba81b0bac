"""The command `record`: tasks for a real GPU, and lessons executed live."""

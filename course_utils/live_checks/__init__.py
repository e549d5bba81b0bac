"""What `record` does beyond measuring: lessons executed live, memory that runs out in every kind of cell, demos."""

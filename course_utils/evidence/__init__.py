"""Evidence: published steps, recordings of real GPUs, and the tables of how right the course is."""

"""PyTorch's caching allocator: its policy, replays of a step, snapshots, the memory map."""

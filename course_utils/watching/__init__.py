"""Code as it is, on a GPU or a simulated one: a whole script, or a block of a notebook; its errors read."""

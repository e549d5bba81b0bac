"""Code that belongs to single lessons, so that notebooks hold ideas and not helpers; one module a subject."""

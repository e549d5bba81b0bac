"""Parts that several lessons use: a small language model, texts, recorded times, search, the cheat sheet."""

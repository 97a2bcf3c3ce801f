"""16-bit storage: none."""

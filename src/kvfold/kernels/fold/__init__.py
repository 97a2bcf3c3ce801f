"""Pages of uniform codes, or of a codebook's, behind a Hadamard rotation: fold. ``encode`` writes every format with statistics
per page."""

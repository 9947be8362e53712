"""A folder tree or a stored zip of photographs -> batches of uint8 pixels. No MPI in here."""

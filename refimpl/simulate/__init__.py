"""Thousands of MPI ranks in one process: the unchanged collectives, counted, traced and timed."""

"""Measurements: `python -m refimpl.bench allreduce` and others, under mpirun where ranks matter."""

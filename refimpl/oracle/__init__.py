"""Given P input buffers: what an allreduce must return, how sure that is, and what yours did instead."""

"""What an allreduce of given buffers must return, how sure that is, and what yours did."""

"""An example: every module of the Python standard library is parsed by a job, and can then be searched."""

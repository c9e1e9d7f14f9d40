"""`python -m pycollect bench`: measure the speed of collectors on this machine."""

"""`python -m pycollect bench`: what this machine reaches."""

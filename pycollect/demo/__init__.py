"""`python -m pycollect demo`: a collector and PPO on a real environment, start to finish."""

"""The environment checker: ``pycollect.check_env`` and ``python -m pycollect check``.

``api`` makes the environments and calls the checks, ``cli`` is the command line. A check is one
function that adds findings to a report; ``report`` lists the codes.
"""

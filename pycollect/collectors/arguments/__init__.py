"""Arguments of the collectors: checked before anything starts, and brought into one form.

Floor below: `scheduler`'s and `stream`'s options. Each error names the argument, the expected value
and the given one.
Way of the data: what the caller passed -> one mapping for each worker -> options and plans.
"""

"""Workers in Ray actors.

Driver's side: `session` joins and leaves Ray. Both sides: `engine` starts actors, and runs in them.

Layers below: the files of `transport`, and `transport.processes`, because an actor on the driver's
node uses a mailbox.
"""

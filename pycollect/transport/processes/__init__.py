"""Worker processes on this machine, reached through mailboxes in shared memory.

Driver's side: `engine` starts a `child`, which is spawned or `forked` by the fork server
(`fork_server`); `handle` sends requests to it. Worker's side: `serve` answers them.
`fork_server_main` runs in the fork server.

Layer below: the files of `transport` itself.
"""

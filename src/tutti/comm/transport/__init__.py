"""Ways to carry bytes from one rank to another: sockets, shared memory, what a plug-in brings."""

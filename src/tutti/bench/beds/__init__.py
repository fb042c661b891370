"""Networks made of namespaces on one Linux machine, flows and faults on them, drawn queues."""

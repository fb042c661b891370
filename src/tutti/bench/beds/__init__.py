"""Networks made of namespaces on one Linux machine, and flows on them."""

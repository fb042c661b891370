"""The dashboard: runs as they happen, in a browser, from what they leave in their folders."""

"""How ranks are let in: the secret, the handshake, the store where they meet."""

"""``rlinf-vla data``: what is done with datasets beside training; one module per word."""

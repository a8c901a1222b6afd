"""What `rlinf-vla bench` measures: one module per benchmark."""

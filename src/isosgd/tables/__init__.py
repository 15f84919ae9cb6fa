"""Tables: how columns become inputs, and the network that is sampled on them."""

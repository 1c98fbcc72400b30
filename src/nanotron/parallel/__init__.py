"""Who holds what and who talks to whom: the device mesh, its collectives, the declaration of a parameter."""

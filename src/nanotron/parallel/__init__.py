"""Who holds what and who talks to whom: the device mesh, its collectives, the declaration of a parameter;
and what ranks agree on through their store."""

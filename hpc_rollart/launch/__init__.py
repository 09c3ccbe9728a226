"""From a config to a running world on this machine, watched until nothing of it is left."""

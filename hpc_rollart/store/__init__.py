"""HDF5 shards of trajectories and the log of consumed batches: schema, writers and reader."""

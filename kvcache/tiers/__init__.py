"""Where blocks and snapshots are beside the device: in the host's memory, or landed from elsewhere. The manager asks
one object, if there is one."""

"""The engines that ours is compared with, each started in a process of its own."""

"""The gripper: watches a function's calls, and takes it out of its project as a sample that runs on its own."""

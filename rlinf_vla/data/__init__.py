"""LeRobotDataset v3.0: reader and writer, and datasets as demonstrations or transitions."""

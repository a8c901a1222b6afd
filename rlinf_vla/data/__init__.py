"""LeRobotDataset v3.0, and its episodes as demonstrations, labelled frames or transitions.

May enter: files of recorded episodes. Read lerobot_format (the layout), lerobot_video,
lerobot_statistics, lerobot_reader, lerobot_writer; then from_dataset, which alone knows policies.
"""

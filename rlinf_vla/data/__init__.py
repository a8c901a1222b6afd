"""LeRobotDatasets, and their episodes as demonstrations, labelled frames or transitions.

May enter: files of recorded episodes. Read lerobot_format (names and types), lerobot_layout (where
each version has its episodes), lerobot_video, lerobot_statistics, lerobot_reader, lerobot_writer;
then dataset_source, from_dataset and value_labels, which alone know policies.
"""

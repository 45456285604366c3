"""The driver library: the GPU, its memory, its occupancy, and the start-up lock.

Knows the CUDA driver, Linux's files about memory and TensorRT-RTX's library; knows no engine, op or
model. Imports `spark_engine` only.
"""

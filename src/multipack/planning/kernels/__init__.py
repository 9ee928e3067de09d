"""The inner loops of planning: plain loops over flat arrays, compiled.

numba's disk cache notices a changed file, but not a change in a function that another file's kernel calls. So a
kernel calls only kernels of its own file (a test keeps it so): packing many documents, placing a block, balancing a
step and bounding it are such families.

Lengths and costs are int64; a document's pack is its number in an int64 array, −1 where it has none. Every
loop is deterministic: ties go to the lower number.
"""

"""List the holders of GPU memory (variables, outputs, …) by name; each storage counts once."""

from gpumagic.display import table

table.register("gpumagic.memory.memory_report.MemoryReport", "gpumagic.memory.memory_report")
table.register("gpumagic.memory.free.Freed", "gpumagic.memory.free")
table.register("gpumagic.memory.memory_changes.MemoryChanges", "gpumagic.memory.memory_changes")
table.register("gpumagic.memory.memory_tree.MemoryTree", "gpumagic.memory.memory_tree")
table.register("gpumagic.memory.out_of_memory.OutOfMemory", "gpumagic.memory.out_of_memory")
table.register("gpumagic.memory.allocator.MemoryPeak", "gpumagic.memory.allocator")

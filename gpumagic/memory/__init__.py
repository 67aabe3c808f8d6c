"""Tell who holds the bytes on each GPU: by name, each storage once, down to the last byte."""

from gpumagic.display import table

table.register("gpumagic.memory.memory_report.MemoryReport", "gpumagic.memory.memory_view")
table.register("gpumagic.memory.freed.Freed", "gpumagic.memory.freed_view")
table.register("gpumagic.memory.memory_changes.MemoryChanges", "gpumagic.memory.changes_view")
table.register("gpumagic.memory.memory_tree.MemoryTree", "gpumagic.memory.tree_view")
table.register("gpumagic.memory.out_of_memory.OutOfMemory", "gpumagic.memory.out_of_memory_view")
table.register("gpumagic.memory.peak.MemoryPeak", "gpumagic.memory.peak_view")

# The other cells of results/grid3.md in modern again, on the CPU that made its counted runs: what the machine
# moves, and the differences with all cells on one machine.
# $ python results/experiment.py results/grid3_repeat_cpu.py run
# Expect 15 runs of 17 minutes on a core of a CPU.
base = 'config/results/grid.py config/modern.py --compile=False'
cells = {
    'symmetric': '--attention=symmetric --learning_rate=5.66e-3',
    'thin': '--n_inner=448 --learning_rate=5.66e-3',
    'original': '--attention=original --learning_rate=4e-3',
}
reference = 'symmetric'
seeds = 1, 2, 3, 4, 5
target = 5.15
all_rows = True

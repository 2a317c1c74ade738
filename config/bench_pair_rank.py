# Rank of pairwise's S = A B^T, from 1 to 32 = n_embd / n_head, the rank of a full S; beside full S,
# `symmetric` and `original` (Courtois et al. 2024): config/compare.py with rotary positions, three seeds.
# $ python bench.py config/bench_pair_rank.py
# Expect 20 minutes on two cores; the outcome is in results/bench.md. The paper has full S alone. Ours: the
# sizes; rotary positions (learned ones are hardly used after 1,000 steps, see results/systems.md); A and B
# start as the first r columns of the identity, plus noise. At full size, one run for each rank, then a
# table of all:
# $ torchrun --standalone --nproc_per_node=8 train.py config/base_pairwise.py --pair_rank=16 \
#       --out_dir=out/base_pairwise_rank16
# $ python bench.py --what=convergence --runs='out/base_pairwise,out/base_pairwise_rank*'
what = 'convergence'
variants = ('original,symmetric,pairwise,pairwise_rank_1,pairwise_rank_2,pairwise_rank_4,pairwise_rank_8,'
            'pairwise_rank_16,pairwise_rank_32')
out_dir = 'out/bench_pair_rank'
position = 'rope'
steps = 600
seeds = 3
eval_interval = 100

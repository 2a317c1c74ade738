# CLUE as in Liu 2022 (arXiv 2205.05842), table 6: 9 tasks, each with its own epochs, batch and rate. GAU has
# one Linear on the final state of [CLS] (`first`); the RoFormers have a pooler, --pooling=gelu.
# $ python finetune.py config/liu/clue.py --init_from=out/base_gau
# Expect (table 5, average): 67.61 for GAU and 67.39 for RoFormerV2 after 30k steps, 75.02 for GAU's longer
# run. results/reproduce.md has the other rows and lists our own choices.
out_dir = 'out/clue_liu'
init_from = 'out/base_gau'
tasks = 'afqmc,csl,iflytek,tnews,wsc,cmnli,cmrc,chid,c3'
pooling = 'first'
block_size = 512
batch_size = 32
overrides = '''
    afqmc.epochs=3    afqmc.total_batch=16    afqmc.learning_rate=3e-5
    csl.epochs=4      csl.total_batch=16      csl.learning_rate=2e-5
    iflytek.epochs=5  iflytek.total_batch=32  iflytek.learning_rate=3e-5
    tnews.epochs=3    tnews.total_batch=16    tnews.learning_rate=2e-5
    wsc.epochs=40     wsc.total_batch=16      wsc.learning_rate=1e-5
    cmnli.epochs=3    cmnli.total_batch=32    cmnli.learning_rate=3e-5
    cmrc.epochs=3     cmrc.total_batch=32     cmrc.learning_rate=3e-5  cmrc.max_answer=50
    chid.epochs=3     chid.total_batch=32     chid.learning_rate=3e-5
    c3.epochs=8       c3.total_batch=24       c3.learning_rate=2e-5
'''

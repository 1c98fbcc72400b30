"""Text from the weights of a model, one token after another, over as many ranks as it needs.

prompts ─► token ids ─► stage 0 ─► … ─► last stage ─► logits of the last token ─► chosen ids ─► all ranks ─► text
             ▲                                                                        │
             └────────────────────────────── the next forward ◄───────────────────────┘

source.open_source(path)        which model a folder holds, and its tokenizer; nothing is loaded yet
model.load_model(…)             this rank's part of it
decode.Decoder(…).tokens(…)     the loop above, for a batch of prompts
text.continuations(…)           whole characters, in the order of the prompts
command                         the two command lines
"""

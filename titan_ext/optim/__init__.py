"""Which optimizer takes which parameter: Titan's parameter groups, by names without wrappers.

``groups`` resolves and checks them, ``muon`` says how DistMuon computes what FSDP has sharded, and
``container`` puts both into Titan's optimizers.
"""

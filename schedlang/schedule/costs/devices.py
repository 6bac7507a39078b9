"""What accelerators can do at most, by their vendors' data sheets.

- A100, SXM: NVIDIA A100 80GB data sheet; DGX A100 for the network, eight links of 200 Gb/s.
- H100, SXM: NVIDIA H100 data sheet; DGX H100 for the network, eight links of 400 Gb/s.
- H200, SXM: NVIDIA H200 data sheet; DGX H200 for the network.
- B200: NVIDIA DGX B200 data sheet, an eighth of the system each.
- GB200 and GB300 in a rack of 72 (NVL72), a node being the rack, since NVLink joins all of it:
  NVIDIA GB200 NVL72 and GB300 NVL72 data sheets, a 72nd of the rack each; ConnectX-7 and ConnectX-8
  for the network, 400 and 800 Gb/s a GPU. NVLink-C2C has 450 GB/s in a direction between a Grace
  CPU and the two GPUs that share it.
- RTX 4090: NVIDIA Ada GPU Architecture whitepaper, appendix A; PCIe 4.0 x16 inside a machine, and a
  network of 100 Gb/s, since a data sheet has none.

Rates of tensor cores are those without sparsity, in 16 bits with sums in 32. A link's bandwidth is
that of one direction; data sheets of NVLink and PCIe add both.
"""

from attrs import frozen

#: The share of a device's memory that is taken where nobody says so. The rest is for what libraries
#: take, and for memory in pieces that are too small.
SHARE_OF_MEMORY = 0.95


@frozen
class Device:
    """An accelerator: operations on floating-point numbers per second, in 16 bits; bytes of memory,
    and how many of them it reads or writes in a second; how many devices a node has, and bytes per
    second from one to another, inside a node and between nodes, and to the memory of the host.
    """

    name: str
    flops: float
    memory: float
    memory_bandwidth: float
    per_node: int
    bandwidth_in_node: float
    bandwidth_between_nodes: float
    bandwidth_to_host: float

    @property
    def room(self) -> float:
        """Bytes for weights, activations and messages, where nobody says how many."""
        return SHARE_OF_MEMORY * self.memory


DEVICES = {
    device.name: device
    for device in (
        Device("A100", 312e12, 80e9, 2.039e12, 8, 300e9, 25e9, 32e9),
        Device("H100", 989e12, 80e9, 3.35e12, 8, 450e9, 50e9, 64e9),
        Device("H200", 989e12, 141e9, 4.8e12, 8, 450e9, 50e9, 64e9),
        Device("B200", 2250e12, 180e9, 8e12, 8, 900e9, 50e9, 64e9),
        Device("GB200", 2500e12, 186e9, 8e12, 72, 900e9, 50e9, 225e9),
        Device("GB300", 2500e12, 279e9, 8e12, 72, 900e9, 100e9, 225e9),
        Device("RTX4090", 165.2e12, 24e9, 1.008e12, 8, 32e9, 12.5e9, 32e9),
    )
}

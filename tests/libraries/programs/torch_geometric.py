# %% GCN: a training step on one graph
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

data = Data(
    x=torch.randn(9, 6), edge_index=torch.randint(0, 9, (2, 20)), y=torch.randint(0, 3, (9,))
)
first, second = GCNConv(6, 8), GCNConv(8, 3)
data, first, second = data.to("cuda:1"), first.to("cuda:1"), second.to("cuda:1")  # own
# --
scores = second(first(data.x, data.edge_index).relu(), data.edge_index)
loss = torch.nn.functional.cross_entropy(scores, data.y)
loss.backward()
result = loss, scores, [p.grad for p in (*first.parameters(), *second.parameters())]

# %% GAT and SAGE, in evaluation
from torch_geometric.nn import GATConv, SAGEConv

x, edges = torch.randn(9, 6), torch.randint(0, 9, (2, 20))
gat, sage = GATConv(6, 4, heads=2).eval(), SAGEConv(8, 3).eval()
x, edges, gat, sage = (part.to("cuda:1") for part in (x, edges, gat, sage))  # own
# --
result = sage(gat(x, edges).relu(), edges)

# %% Batches of graphs from a loader, pooled
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_mean_pool

graphs = [
    Data(x=torch.randn(n, 4), edge_index=torch.randint(0, n, (2, 2 * n))) for n in (3, 5, 4, 6)
]
net = GINConv(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
net = net.to("cuda:1")  # own
loader = DataLoader(graphs, batch_size=2)
# --
home = next(net.parameters()).device
result = []
for batch in loader:
    batch = batch.to(home)
    result.append(global_mean_pool(net(batch.x, batch.edge_index), batch.batch))

# %% A graph of several kinds of nodes
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

data = HeteroData()
data["author"].x, data["paper"].x = torch.randn(4, 5), torch.randn(6, 3)
data["author", "writes", "paper"].edge_index = torch.stack([torch.arange(4), torch.arange(4)])
net = HeteroConv({("author", "writes", "paper"): SAGEConv((5, 3), 7)})
data, net = data.to("cuda:1"), net.to("cuda:1")  # own
# --
result = net(data.x_dict, data.edge_index_dict)

# %% Transforms, neighbors and a made graph
import torch_geometric.transforms as T
from torch_geometric.data import Data
from torch_geometric.utils import degree, dropout_edge, to_dense_adj

cloud = Data(pos=torch.rand(12, 3), edge_index=torch.randint(0, 12, (2, 30)))
cloud = cloud.to("cuda:1")  # own
# --
changed = T.Compose([T.NormalizeScale(), T.ToUndirected(), T.Cartesian(), T.AddSelfLoops()])(cloud)
kept, _ = dropout_edge(changed.edge_index, p=0.3)
result = changed.pos, degree(kept[0], 12), to_dense_adj(kept)

# %% A link predictor: an encoder, negative samples and an inner product
from torch_geometric.data import Data
from torch_geometric.nn import GAE, GCNConv

data = Data(x=torch.randn(9, 6), edge_index=torch.randint(0, 9, (2, 20)))
net = GAE(GCNConv(6, 4))
data, net = data.to("cuda:1"), net.to("cuda:1")  # own
# --
hidden = net.encode(data.x, data.edge_index)
loss = net.recon_loss(hidden, data.edge_index, data.edge_index.flip(0))
loss.backward()
result = loss, hidden

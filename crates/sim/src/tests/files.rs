//! Descriptions of clusters, as people write them.

use crate::{Cluster, HostSpeed};

const HOST: &str = "[[hosts]]\ncores = 4\nmemory_gib = 8\ngflops = 50\ncore_gbs = 10\n";

#[test]
fn a_description_is_read() {
    let text = format!(
        "{HOST}count = 3\nprice = 0.5\n[[hosts]]\ncores = 2\nmemory_gib = 4\ngflops = 25\ncore_gbs = 5\nspeed = 0.5\nprice = 1\n[inside]\nby = \"processes\"\n[between]\nlatency_us = 10\ngbits = 100\n"
    );
    let cluster = Cluster::parse(&text).unwrap();
    assert_eq!((cluster.hosts.len(), cluster.hosts[3].slowness), (4, 2.0));
    assert_eq!(cluster.between.bytes_per_us, 12_500.0);
    assert_eq!(cluster.price_per_hour(), Some(2.5));
    let HostSpeed::Described(speed) = &cluster.hosts[0].speed else { panic!("described") };
    assert_eq!((speed.flops_per_us, speed.host_bytes_per_us), (50e3, 40e3));
}

#[test]
fn the_example_is_one() {
    let cluster = Cluster::parse(include_str!("../../../../examples/clusters/cloud-8x32.toml")).unwrap();
    assert_eq!((cluster.hosts.len(), cluster.hosts[0].cores), (8, 32));
}

#[test]
fn mistakes_are_named() {
    let rows = [
        ("", "no hosts"),
        ("[[hosts]]\ncount = 0\ncores = 4\nmemory_gib = 8\ngflops = 5\ncore_gbs = 1\n", "no hosts"),
        ("[[hosts]]\ncores = 4\n", "memory_gib"),
        (&format!("{HOST}colour = 3\n"), "colour"),
        (&format!("{HOST}speed = 0\n"), "hosts[0].speed"),
        (&format!("{HOST}price = -1\n"), "hosts[0].price"),
        (&format!("{HOST}[between]\nlatency_us = 1\ngbits = 0\n"), "between.gbits"),
        (&format!("{HOST}[inside]\nby = \"pigeons\"\n"), "pigeons"),
        ("hosts = 3", "hosts"),
    ];
    for (text, want) in rows {
        let error = Cluster::parse(text).unwrap_err().to_string();
        assert!(error.contains(want), "{want}: {error}");
    }
}

//! IP addresses in one form for both families. Refuses scopes and zones.

/// An IPv6 address, or an IPv4 address in its mapped form (`::ffff:a.b.c.d`): four words in network byte order, as the
/// kernel's contexts give them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// Each word is in network byte order.
    pub words: [u32; 4],
}

/// The third word of every mapped IPv4 address.
const MAPPED_BE: u32 = 0x0000_ffffu32.to_be();

impl Address {
    /// `::`, which also stands for "none".
    pub const UNSPECIFIED: Self = Self { words: [0; 4] };
    /// `0.0.0.0`.
    pub const UNSPECIFIED_V4: Self = Self::v4(0);
    /// `::1`.
    pub const LOCALHOST_V6: Self = Self { words: [0, 0, 0, 1u32.to_be()] };
    /// `127.0.0.1`.
    pub const LOCALHOST_V4: Self = Self::v4(0x7f00_0001u32.to_be());

    /// An IPv4 address from its network-order word.
    #[inline(always)]
    #[must_use]
    pub const fn v4(word_be: u32) -> Self {
        Self { words: [0, 0, MAPPED_BE, word_be] }
    }

    /// The network-order word of an IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn as_v4(&self) -> Option<u32> {
        if self.is_v4() { Some(self.words[3]) } else { None }
    }

    /// Whether this is an IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == MAPPED_BE
    }

    /// `0.0.0.0` or `::`; a connect to it reaches this host.
    #[inline(always)]
    #[must_use]
    pub const fn is_unspecified(&self) -> bool {
        self.words[0] == 0
            && self.words[1] == 0
            && (self.words[2] == MAPPED_BE || self.words[2] == 0)
            && self.words[3] == 0
    }

    /// `127.0.0.0/8` or `::1`.
    #[inline(always)]
    #[must_use]
    pub const fn is_loopback(&self) -> bool {
        if self.is_v4() {
            u32::from_be(self.words[3]) >> 24 == 127
        } else {
            self.words[0] == 0 && self.words[1] == 0 && self.words[2] == 0 && self.words[3] == 1u32.to_be()
        }
    }

    /// The sixteen bytes in network order.
    #[inline(always)]
    #[must_use]
    pub const fn octets(&self) -> [u8; 16] {
        let [a, b, c, d] = [
            self.words[0].to_ne_bytes(),
            self.words[1].to_ne_bytes(),
            self.words[2].to_ne_bytes(),
            self.words[3].to_ne_bytes(),
        ];
        [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]]
    }
}

impl From<core::net::IpAddr> for Address {
    fn from(ip: core::net::IpAddr) -> Self {
        let octets = match ip {
            core::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            core::net::IpAddr::V6(v6) => v6.octets(),
        };
        let word = |at: usize| u32::from_ne_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]]);
        Self { words: [word(0), word(4), word(8), word(12)] }
    }
}

impl From<Address> for core::net::IpAddr {
    /// Mapped addresses are converted to IPv4.
    fn from(address: Address) -> Self {
        core::net::IpAddr::V6(core::net::Ipv6Addr::from(address.octets())).to_canonical()
    }
}

#[cfg(test)]
mod tests {
    use core::net::IpAddr;

    use proptest::prelude::*;

    use super::*;

    fn address(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    proptest! {
        #[test]
        fn survives_the_round_trip(octets: [u8; 16]) {
            let ip = IpAddr::from(octets).to_canonical();
            prop_assert_eq!(IpAddr::from(Address::from(ip)), ip);
        }

        #[test]
        fn agrees_with_std_about_ipv4(word: u32) {
            let ip = core::net::Ipv4Addr::from(word);
            let address = Address::v4(word.to_be());
            prop_assert_eq!(IpAddr::from(address), IpAddr::V4(ip));
            prop_assert_eq!(address.is_loopback(), ip.is_loopback());
            prop_assert_eq!(address.is_unspecified(), ip.is_unspecified());
        }
    }

    #[test]
    fn tells_loopback_from_the_rest() {
        for (text, expected) in [
            ("127.0.0.1", true),
            ("127.255.255.254", true),
            ("::1", true),
            ("::ffff:127.1.2.3", true),
            ("128.0.0.1", false),
            ("::2", false),
            ("::", false),
            ("1::1", false),
        ] {
            assert_eq!(address(text).is_loopback(), expected, "{text}");
        }
    }

    #[test]
    fn mapped_and_plain_ipv4_are_the_same() {
        assert_eq!(address("::ffff:10.1.2.3"), address("10.1.2.3"));
        assert_eq!(address("10.1.2.3").as_v4(), Some(u32::from_be_bytes([10, 1, 2, 3]).to_be()));
        assert_eq!(address("fd00::1").as_v4(), None);
    }
}
